// Distances and weights, converted from one unit into another.

// The number of kilometres in a number of miles.
function fromMilesToKilometres(miles) {
  if (miles < 0) {
    throw new Error("miles must not be negative");
  }
  const kilometres = miles * 1.609;
  return kilometres;
}

// The number of miles in a number of kilometres.
function fromKilometresToMiles(kilometres) {
  if (kilometres < 0) {
    throw new Error("kilometres must not be negative");
  }
  const miles = kilometres / 1.609;
  return miles;
}

// The number of metres in a number of yards.
function fromYardsToMetres(yards) {
  if (yards < 0) {
    throw new Error("yards must not be negative");
  }
  const metres = yards * 0.914;
  return metres;
}

// The number of yards in a number of metres.
function fromMetresToYards(metres) {
  if (metres < 0) {
    throw new Error("metres must not be negative");
  }
  const yards = metres / 0.914;
  return yards;
}

// The number of metres in a number of feet.
function fromFeetToMetres(feet) {
  if (feet < 0) {
    throw new Error("feet must not be negative");
  }
  const metres = feet * 0.305;
  return metres;
}

// The number of feet in a number of metres.
function fromMetresToFeet(metres) {
  if (metres < 0) {
    throw new Error("metres must not be negative");
  }
  const feet = metres / 0.305;
  return feet;
}

// The number of centimetres in a number of inches.
function fromInchesToCentimetres(inches) {
  if (inches < 0) {
    throw new Error("inches must not be negative");
  }
  const centimetres = inches * 2.54;
  return centimetres;
}

// The number of inches in a number of centimetres.
function fromCentimetresToInches(centimetres) {
  if (centimetres < 0) {
    throw new Error("centimetres must not be negative");
  }
  const inches = centimetres / 2.54;
  return inches;
}

// The number of kilograms in a number of pounds.
function fromPoundsToKilograms(pounds) {
  if (pounds < 0) {
    throw new Error("pounds must not be negative");
  }
  const kilograms = pounds * 0.454;
  return kilograms;
}

// The number of pounds in a number of kilograms.
function fromKilogramsToPounds(kilograms) {
  if (kilograms < 0) {
    throw new Error("kilograms must not be negative");
  }
  const pounds = kilograms / 0.454;
  return pounds;
}

// The number of grams in a number of ounces.
function fromOuncesToGrams(ounces) {
  if (ounces < 0) {
    throw new Error("ounces must not be negative");
  }
  const grams = ounces * 28.35;
  return grams;
}

// The number of ounces in a number of grams.
function fromGramsToOunces(grams) {
  if (grams < 0) {
    throw new Error("grams must not be negative");
  }
  const ounces = grams / 28.35;
  return ounces;
}

// The number of litres in a number of gallons.
function fromGallonsToLitres(gallons) {
  if (gallons < 0) {
    throw new Error("gallons must not be negative");
  }
  const litres = gallons * 4.546;
  return litres;
}

// The number of gallons in a number of litres.
function fromLitresToGallons(litres) {
  if (litres < 0) {
    throw new Error("litres must not be negative");
  }
  const gallons = litres / 4.546;
  return gallons;
}

// The number of litres in a number of pints.
function fromPintsToLitres(pints) {
  if (pints < 0) {
    throw new Error("pints must not be negative");
  }
  const litres = pints * 0.568;
  return litres;
}

// The number of pints in a number of litres.
function fromLitresToPints(litres) {
  if (litres < 0) {
    throw new Error("litres must not be negative");
  }
  const pints = litres / 0.568;
  return pints;
}

// The number of hectares in a number of acres.
function fromAcresToHectares(acres) {
  if (acres < 0) {
    throw new Error("acres must not be negative");
  }
  const hectares = acres * 0.405;
  return hectares;
}

// The number of acres in a number of hectares.
function fromHectaresToAcres(hectares) {
  if (hectares < 0) {
    throw new Error("hectares must not be negative");
  }
  const acres = hectares / 0.405;
  return acres;
}

// The number of kilograms in a number of stones.
function fromStonesToKilograms(stones) {
  if (stones < 0) {
    throw new Error("stones must not be negative");
  }
  const kilograms = stones * 6.35;
  return kilograms;
}

// The number of stones in a number of kilograms.
function fromKilogramsToStones(kilograms) {
  if (kilograms < 0) {
    throw new Error("kilograms must not be negative");
  }
  const stones = kilograms / 6.35;
  return stones;
}
